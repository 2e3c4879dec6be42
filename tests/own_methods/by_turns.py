"""One layer after the other trains, for an epoch each, and a fresh head throughout."""

from dpft.method import Method, fresh_head


class ByTurns(Method):
    unfreezes = True

    def start(self, context):
        self.step(context, 0)

    def step(self, context, t):
        own = {id(parameter) for parameter in context.body}
        layers = [[p for p in layer.parameters(recurse=False) if id(p) in own]
                  for layer in context.model.modules()]
        layers = [layer for layer in layers if layer]
        turn = t * context.batch_size // context.size % len(layers)
        context.train_only([*layers[turn], *fresh_head(context.model)])
