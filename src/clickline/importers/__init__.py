"""Configs of earlier systems become a clickline.yaml that says where each of its keys comes from."""
