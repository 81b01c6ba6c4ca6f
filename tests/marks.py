"""Conditions under which a test can run."""

import pytest

from coterie.compute.availability import unavailable

compiles = pytest.mark.skipif(unavailable() is not None, reason=f"nothing is compiled here: {unavailable()}")
