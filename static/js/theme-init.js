// Runs before the first paint, so that a stored theme never flashes the other one. A classic script for that reason.
(() => {
  let stored = null;
  try {
    stored = localStorage.getItem("hydra-theme");
  } catch {
    // Storage can be forbidden; the system's preference then decides alone.
  }
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
})();
