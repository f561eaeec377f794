"""The network between the agents of a run, one per node: control messages and bulk bytes. Imported only by jobs on several nodes.

`seam` says what sessions use, `peers` is the real thing; `docs/network.md` tells what goes over the wire and what is refused.
"""
