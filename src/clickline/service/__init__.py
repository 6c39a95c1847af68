"""What every server of ours needs: who may ask, ports, and lines of a log."""
