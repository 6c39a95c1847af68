"""Ray: connecting to a cluster, joining it as a node, and mapping a function over its processes."""
