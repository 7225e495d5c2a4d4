import flowrl


@flowrl.reward(scale="mean of the red channel, 0 to 1")
def red(media, prompts, context=None, *, floor: float = 0.0):
    return media[..., 0, :, :].flatten(1).mean(1) - floor
