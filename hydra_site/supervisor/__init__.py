"""The supervisor behind `make run`: it starts, watches, restarts and ends every process of one HYDRA_HOME.

Words: a *child* is a process the supervisor runs; a *server* is one of the two embedded children, PostgreSQL and
Valkey;
a *leftover* is a process or file of a run that was killed; *borrowing* is what a management command does that needs the
database while nothing runs. Nothing here knows Django, models or tables.
"""
