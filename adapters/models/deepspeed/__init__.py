"""DeepSpeed: a model divided over processes by ZeRO."""
