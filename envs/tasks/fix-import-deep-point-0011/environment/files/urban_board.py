from double_line import ready_product
def dry_area(x): return ready_product(x) + 19
