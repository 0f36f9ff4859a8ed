"""torch and JAX in one program: shared arrays, functions and modules of one library called by the other.

=======================  ==========================================================================================
file                     public names it holds
=======================  ==========================================================================================
arrays.py                ``isthmus.to_jax``, ``isthmus.from_jax``
functions.py             ``isthmus.jax_function``; traced_functions.py has the op ``isthmus::jax`` it calls
custom_ops.py            ``isthmus.custom_op``
modules.py               ``isthmus.jax_module``; module_adapter.py, flax.py and equinox.py know the libraries
torch_functions.py       ``isthmus.torch_function``; x64_primitive.py and autograd_functions.py serve it
functional.py            ``isthmus.functional``
training.py, remat.py    ``isthmus.train_step``
generate.py              ``isthmus.generate``; decoding.py has its programs, token_choice.py the choice of a token
checkpoints.py           ``isthmus.checkpoint.save`` and ``load``; optax_states.py has ``to_optax`` and ``from_optax``
pytrees.py               what trees need to cross
=======================  ==========================================================================================

``isthmus.optax`` is built on ``jax_function`` and lives beside this folder.
"""

from isthmus._device.torch_glue.registration import load

# from_jax makes tensors without calling an op, so the kernels must be registered before the first one.
load()
