// Follows a drain: fetches the part of the page that changes while it goes on, then the whole page once, for its last buttons.

const EVERY_MS = 1000;
const part = document.getElementById("drain");

/** True while there is more to follow. */
async function look() {
  try {
    const answer = await fetch(`${location.pathname}?part`, { headers: { Accept: "text/html" } });
    if (answer.redirected) {
      // Logged out meanwhile: the page itself leads to the login.
      location.reload();
      return false;
    }
    // What is shown is old where the site answers with a fault, and says so by its colour.
    part.classList.toggle("stale", !answer.ok);
    if (!answer.ok) {
      // Its row is gone, or one may not see it any more: that does not pass.
      return answer.status >= 500 || answer.status === 429;
    }
    const text = await answer.text();
    if (text !== part.dataset.text) {
      part.dataset.text = text;
      part.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.childNodes);
    }
    if (part.querySelector('[data-open="no"]')) {
      location.reload();
      return false;
    }
  } catch {
    // The site does not answer.
    part.classList.add("stale");
  }
  return true;
}

async function follow() {
  if (document.visibilityState !== "visible" || (await look())) setTimeout(follow, EVERY_MS);
}

setTimeout(follow, EVERY_MS);
