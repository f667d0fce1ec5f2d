"""Measures our kernels and every installed peer on the same inputs in one run; see `mla-backend bench`."""
