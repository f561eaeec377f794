"""Pure decisions: what is written by whom, what counts, what is kept, what is read from where.

Invariants: no I/O, no clock, no randomness; time and whatever else varies come in as arguments. Everything here can
be called twice with the same arguments and gives the same answer, on any rank.
"""
