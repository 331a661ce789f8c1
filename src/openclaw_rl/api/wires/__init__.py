"""The wires besides chat completions: pure translators into a chat request, and from a completion's deltas.

Each wire has a module for requests and one for answers. A conversation that began on one wire continues on any other,
because capture sees only chat requests.
"""
