"""Hypothesis profiles. HYPOTHESIS_PROFILE selects one, `make test` says `ci`; a plain pytest takes `dev`."""

import os

# small tensors wait for threads longer than they are worked on, and engines side by side for the same cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# what `make` exports, for a plain pytest: small engines, no hub
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import HealthCheck, settings

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)  # a busy machine is no reason to fail

settings.register_profile("dev", max_examples=80, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci", max_examples=300, deadline=None, suppress_health_check=_SLOW, derandomize=True, print_blob=True
)
settings.register_profile("thorough", max_examples=3000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "dev")
