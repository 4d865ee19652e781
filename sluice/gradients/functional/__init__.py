"""Parameters that a forward pass uses outside a layer with a rule: class tokens, layer scales, functional weights.

`trace` finds out, by running the model on two samples and on three, which functions such parameters go through and where they
meet the samples; `follower` goes along with a recorded forward pass; `meeting` and `rules` say what happens at each kind of
function; `pullback` brings gradients of what was computed from parameters back to the parameters.
"""
