"""The logical KV cache: blocks, tables, the radix tree of prefixes, eviction. No memory."""
