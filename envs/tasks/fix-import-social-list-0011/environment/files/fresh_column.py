from dry_area import short_host
def ready_project(x): return short_host(x) - 3
