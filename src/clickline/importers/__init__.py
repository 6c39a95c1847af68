"""Converts configs of other systems to a clickline.yaml whose comments say where each key comes from."""
