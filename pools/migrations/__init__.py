"""Schema changes of the app, in order."""
