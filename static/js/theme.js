// The theme toggle. "hydra-theme" in localStorage overrides the system's preference; choosing the system's own forgets it.

const systemDark = matchMedia("(prefers-color-scheme: dark)");

export function currentTheme() {
  return document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light");
}

/** Calls `listener` whenever the shown theme changes, by the toggle or by the system. */
export function onThemeChange(listener) {
  document.addEventListener("hydra-theme", listener);
  systemDark.addEventListener("change", listener);
}

function choose(theme) {
  const system = systemDark.matches ? "dark" : "light";
  if (theme === system) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    if (theme === system) localStorage.removeItem("hydra-theme");
    else localStorage.setItem("hydra-theme", theme);
  } catch {
    // Without storage the choice lasts as long as the page.
  }
  document.dispatchEvent(new CustomEvent("hydra-theme"));
}

for (const button of document.querySelectorAll("[data-theme-toggle]")) {
  button.addEventListener("click", () => choose(currentTheme() === "dark" ? "light" : "dark"));
}
