"""The device: host logic around the head's and the SLM's static graphs, and the back ends that run those graphs."""
