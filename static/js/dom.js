// Building and updating elements. Text always goes in as text nodes, never as markup.

/** h("p", {class: "x", "data-y": 1, onclick: f}, "text", child…) → element. null, undefined and false children are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Sets text only when it differs, so that a selection or a screen reader is not disturbed once a second. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/**
 * Makes `parent` hold one element per item, in order. Elements are kept by key, so that focus, selection and transitions
 * survive an update. `create(item)` returns an element; `update(element, item)` fills it.
 */
export function keyed(parent, items, keyOf, create, update) {
  parent.keyedChildren ??= new Map();
  const before = parent.keyedChildren;
  const after = new Map();
  for (const item of items) {
    const key = keyOf(item);
    const element = before.get(key) ?? create(item);
    after.set(key, element);
    update(element, item);
  }
  for (const [key, element] of before) if (!after.has(key)) element.remove();
  let place = null;
  for (const element of after.values()) {
    const expected = place ? place.nextSibling : parent.firstChild;
    if (expected !== element) parent.insertBefore(element, expected);
    place = element;
  }
  parent.keyedChildren = after;
}
