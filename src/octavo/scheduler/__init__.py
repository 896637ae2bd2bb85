"""Who computes what in a step: queues, admission, chunking, preemption."""
