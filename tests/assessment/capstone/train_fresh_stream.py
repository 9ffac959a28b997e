"""The stream that is restored is not the one that is read."""

STEP, HINT = 10, "after_kill"

INSTEAD = {
    """
    stream = Stream(config)
    step = load(config, model, optimizer, stream)
""": """
    step = load(config, model, optimizer, Stream(config))
    stream = Stream(config)
"""
}
