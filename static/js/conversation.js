// The conversation as data, kept in this tab's sessionStorage: messages, settings, and the key that names its session.

const STORAGE_KEY = "hydra-playground";

export function randomName() {
  // crypto.randomUUID exists only on https and localhost.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  /** messages: {role: "user"|"assistant", text, reasoning?, error?, result?, engine?}. settings: the form's values by id. */
  constructor() {
    this.key = randomName();
    this.messages = [];
    this.settings = {};
    try {
      Object.assign(this, JSON.parse(sessionStorage.getItem(STORAGE_KEY) ?? "{}"));
    } catch {
      // Storage forbidden or unreadable: an empty conversation is the honest start.
    }
  }

  save() {
    try {
      const { key, messages, settings } = this;
      sessionStorage.setItem(STORAGE_KEY, JSON.stringify({ key, messages, settings }));
    } catch {
      // Full or forbidden: the conversation then lives as long as the page.
    }
  }

  clear() {
    this.key = randomName();
    this.messages = [];
    this.save();
  }

  /** The OpenAI body for the next answer: everything said so far, and the settings. */
  body() {
    const { system, model, temperature, "max-tokens": maxTokens, "top-p": topP } = this.settings;
    const said = this.messages.filter((message) => message.text);
    const messages = said.map(({ role, text }) => ({ role, content: text }));
    if (system?.trim()) messages.unshift({ role: "system", content: system });
    const body = { messages, temperature: Number(temperature), top_p: Number(topP) };
    if (model) body.model = model;
    if (Number(maxTokens) >= 1) body.max_tokens = Math.floor(Number(maxTokens));
    return body;
  }
}
