"""The index of a dynamic table: assigns table rows to ids, with admission and eviction."""
