"""The benchmarks behind `mla-backend bench`, a package beside the library.

benchmarks/README.md says what each one measures.
"""
