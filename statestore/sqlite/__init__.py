"""The embedded catalog: one SQLite file, shared by the processes of one host."""
