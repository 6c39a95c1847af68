"""Training that outgrows one machine, on Ray: plan, leases, shards, workers, and the driver that deals out work."""
