"""`make chaos`: a real daemon under the faults of machines, networks and users, and exact books kept."""
