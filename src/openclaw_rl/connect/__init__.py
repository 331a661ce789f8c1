"""Configures other programs to use a server: what each client has to be told, and how its file is changed."""
