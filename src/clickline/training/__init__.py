"""Dataset to checkpoint: one training step, the loop on one machine, the loop on Ray, and training hour by hour."""
