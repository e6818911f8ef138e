// One message on the page: what was said, how it is going, what it cost.

import { copyButton } from "./copy.js";
import { h, setText } from "./dom.js";
import { count, duration, plural, rate } from "./format.js";
import { GrowingMarkdown } from "./markdown.js";

const ENDINGS = { length: "cut at the token limit", stopped: "stopped" };

/** The line under an answer: speed, first token, length, where it ran. Unknown parts are left out. */
export function statsLine({ result, engine }) {
  if (!result) return "";
  const { usage, timings, first_token_s: firstTokenS, finish_reason: finish, tokens_per_s: seenRate } = result;
  const parts = [];
  const tokensPerS = timings?.predicted_per_second || seenRate;
  if (tokensPerS) parts.push(`${rate(tokensPerS)} tokens/s`);
  if (firstTokenS !== null && firstTokenS !== undefined) parts.push(`first token ${duration(firstTokenS)}`);
  if (usage) parts.push(plural(usage.completion_tokens, "token"));
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(`prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} cached` : ""}`);
  if (timings?.draft_n) parts.push(`${count(timings.draft_n_accepted)} of ${count(timings.draft_n)} drafted right`);
  if (engine) parts.push(engine);
  if (ENDINGS[finish]) parts.push(ENDINGS[finish]);
  return parts.join(" · ");
}

export class MessageView {
  /** `message` is shared with the conversation and filled while the answer arrives. */
  constructor(message, { onRegenerate }) {
    this.message = message;
    const assistant = message.role === "assistant";
    this.thoughts = h("div", { class: "thoughts-text" });
    this.thoughtsBox = h("details", { class: "thoughts", hidden: true }, h("summary", {}, "Thoughts"), this.thoughts);
    this.said = h("div", { class: "said", "data-testid": "message-text" });
    this.waiting = h("div", { class: "waiting", hidden: true }, (this.waitingText = h("span", {})), h("progress", { max: "1", hidden: true, "aria-label": "Prompt read" }));
    this.error = h("div", { class: "message-error", hidden: true, role: "alert", "data-testid": "message-error" });
    this.stats = h("p", { class: "stats", "data-testid": "message-stats" });
    this.regenerate = h("button", { type: "button", class: "quiet-button", onclick: onRegenerate, "data-testid": "regenerate" }, "Regenerate");
    this.actions = h("div", { class: "message-actions" }, copyButton(() => message.text, { "data-testid": "copy" }), assistant && this.regenerate);
    this.element = h("article", { class: `message ${message.role}`, "data-testid": `message-${message.role}` },
      h("h2", { class: "visually-hidden" }, assistant ? "Answer" : "You"),
      assistant && this.thoughtsBox, this.said, this.waiting, this.error,
      h("footer", {}, assistant && this.stats, this.actions));
    if (assistant) {
      this.growing = new GrowingMarkdown(this.said);
      this.growing.append(message.text);
      this.drawReasoning();
      this.finish();
    } else {
      setText(this.said, message.text);
    }
  }

  /** Shows the answer as being under way. `text` says what is waited for. */
  wait(text, done = null) {
    this.element.setAttribute("aria-busy", "true");
    this.actions.hidden = true;
    this.waiting.hidden = false;
    setText(this.waitingText, text);
    const bar = this.waiting.querySelector("progress");
    bar.hidden = done === null;
    if (done !== null) bar.value = done;
  }

  append(text) {
    this.waiting.hidden = true;
    this.element.classList.add("writing");
    this.message.text += text;
    this.growing.append(text);
  }

  appendReasoning(text) {
    this.waiting.hidden = true;
    this.message.reasoning = (this.message.reasoning ?? "") + text;
    this.drawReasoning();
  }

  drawReasoning() {
    this.thoughtsBox.hidden = !this.message.reasoning;
    setText(this.thoughts, this.message.reasoning ?? "");
  }

  /** Shows the answer as ended, with its numbers or its error. */
  finish() {
    this.element.removeAttribute("aria-busy");
    this.element.classList.remove("writing");
    this.waiting.hidden = true;
    this.actions.hidden = false;
    setText(this.stats, statsLine(this.message));
    const { error } = this.message;
    this.error.hidden = !error;
    this.error.replaceChildren(...(error ? [h("p", {}, error.message), error.hint ? h("p", { class: "hint" }, error.hint) : ""] : []));
    setText(this.regenerate, error ? "Try again" : "Regenerate");
    this.actions.firstChild.hidden = !this.message.text;
  }
}
