// Follows a drain: fetches the part of the page that changes while it goes on, then the whole page once, for its last buttons.

const EVERY_MS = 1000;
const part = document.getElementById("drain");

async function look() {
  if (document.visibilityState === "visible") {
    try {
      const answer = await fetch(`${location.pathname}?part`, { headers: { Accept: "text/html" } });
      // Logged out meanwhile: the page itself leads to the login.
      if (answer.redirected) return location.reload();
      if (answer.ok) {
        const text = await answer.text();
        if (text !== part.dataset.text) {
          part.dataset.text = text;
          part.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.childNodes);
        }
        part.classList.remove("stale");
        if (part.querySelector('[data-open="no"]')) return location.reload();
      }
    } catch {
      // The site does not answer: what is shown is old, and says so by its colour.
      part.classList.add("stale");
    }
  }
  setTimeout(look, EVERY_MS);
}

setTimeout(look, EVERY_MS);
