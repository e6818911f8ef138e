"""Filters of the panel's templates."""
