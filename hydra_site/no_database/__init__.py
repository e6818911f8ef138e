"""The database backend of a home whose servers are not known: commands that need no database run, others say what to do."""
