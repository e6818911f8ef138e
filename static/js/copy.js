// Copying text, also where the Clipboard API is missing: it exists only on https and localhost.

import { h, setText } from "./dom.js";

function copyBySelection(text) {
  const area = h("textarea", { class: "visually-hidden", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/** A button that copies what `textOf()` returns, and says whether it worked. */
export function copyButton(textOf, attributes = {}) {
  const button = h("button", { type: "button", class: "quiet-button", ...attributes }, "Copy");
  button.addEventListener("click", async () => {
    setText(button, (await copy(textOf())) ? "Copied" : "Copy failed");
    setTimeout(() => setText(button, "Copy"), 1500);
  });
  return button;
}
