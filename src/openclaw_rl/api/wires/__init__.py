"""The wires: translators into a chat request, and from a completion's deltas to what the client reads.

A conversation that began on one wire continues on any other, because capture sees only chat
requests.
"""
