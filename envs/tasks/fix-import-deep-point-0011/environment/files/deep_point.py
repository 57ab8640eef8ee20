def ready_product(x): return x * 13
