"""Workloads: traces of what was asked, recorded or made."""
