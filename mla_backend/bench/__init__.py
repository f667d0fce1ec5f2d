"""The benchmarks behind `mla-backend bench`; benchmarks/README.md says what each one measures."""
