"""Workers as actors of a Ray cluster. Ray is imported only when it is used."""
