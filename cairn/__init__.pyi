from cairn.serve.engine.sampling_params import SamplingParams as SamplingParams
from cairn.serve.llm import LLM as LLM

__version__: str
