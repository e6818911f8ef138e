"""Wiring of the site: settings, routes, pages, and the supervisor behind `make run`."""
