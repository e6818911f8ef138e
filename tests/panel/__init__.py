"""The panel's pages and WebSockets, on the real database and channel layer."""
