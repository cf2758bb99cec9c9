"""Benchmarks: ``python -m benchmarks`` runs all suites, ``python -m benchmarks scan step`` some (see ``--help``)."""
