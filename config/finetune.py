# Trains GPT-2's released weights (downloaded once) further, on Shakespeare or --dataset=<your text>: 32 sequences x 256
# = 8,192 tokens a step, 100 steps. Architecture and tokenizer are those of init_from, which can also be a checkpoint of
# yours, or a Llama, Qwen, Mistral, SmolLM or GPT-2 in the format of Hugging Face, in a folder or on the hub
# (owner/model):
#   python train.py config/finetune.py --init_from=out/python/step_00001000 --dataset=my_code/
#   python train.py config/finetune.py --init_from=auto:gpt2        # goes on if it was killed
# The result has not been measured here.
dataset = 'shakespeare'
init_from = 'gpt2'
block_size = 256            # of a batch; the model keeps its own

batch_size = 32
micro_batch_size = 4
max_iters = 100
optimizer = 'adamw'
learning_rate = 3e-5
warmup_iters = 10
beta2 = 0.95

eval_interval = 20          # and before the first step
save_interval = 100         # a checkpoint of GPT-2 with its moments has 1.5 GB
sample_start = '\n'
log_interval = 1
