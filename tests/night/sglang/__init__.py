"""Models and requests for tests/night/test_sglang.py, which the environments of both engines import."""
