"""Example models and applications built on mmkit."""
