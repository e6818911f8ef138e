// A WebSocket that comes back: reconnects with growing pauses, at once when the page is shown or the network returns.

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15000;
const NOT_LOGGED_IN = 4401;

export class LiveSocket {
  /** `onState` gets "connecting", "open" or "closed"; `onMessage` gets parsed JSON. */
  constructor(path, { onMessage, onState = () => {} }) {
    this.url = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${path}`;
    this.onMessage = onMessage;
    this.onState = onState;
    this.pauseMs = FIRST_PAUSE_MS;
    this.timer = null;
    this.socket = null;
    addEventListener("online", () => this.hurry());
    document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.hurry());
    // Not before the caller holds this object.
    queueMicrotask(() => this.connect());
  }

  get isOpen() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  /** Sends an object as JSON; false if the connection is down. */
  send(message) {
    if (!this.isOpen) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  connect() {
    this.timer = null;
    this.onState("connecting");
    const socket = new WebSocket(this.url);
    this.socket = socket;
    socket.onopen = () => {
      this.onState("open");
    };
    socket.onmessage = (event) => {
      this.pauseMs = FIRST_PAUSE_MS;
      this.onMessage(JSON.parse(event.data));
    };
    socket.onclose = (event) => {
      if (event.code === NOT_LOGGED_IN) {
        location.assign(`/login/?next=${encodeURIComponent(location.pathname)}`);
        return;
      }
      this.onState("closed");
      // Spread over half the pause, so that all pages do not return at the same moment after a restart.
      this.timer = setTimeout(() => this.connect(), this.pauseMs * (0.75 + Math.random() / 2));
      this.pauseMs = Math.min(this.pauseMs * 1.7, LONGEST_PAUSE_MS);
    };
  }

  hurry() {
    if (this.timer === null) return;
    clearTimeout(this.timer);
    this.pauseMs = FIRST_PAUSE_MS;
    this.connect();
  }
}
