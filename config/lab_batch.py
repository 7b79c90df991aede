# How large should a batch be? The same tokens in batches of 1 to 512 sequences, each with rates around its best, three seeds.
# config/lab_batch_time.py asks the same for the same time.
#   python bench.py config/lab.py config/lab_batch.py --dataset=my_text.txt
what = 'compare'
out_dir = 'out/lab_batch'
_sequences = max_iters * batch_size
_rates = {1: '1.3e-03 2.5e-03 5.0e-03', 8: '3.5e-03 7.1e-03 1.4e-02', 32: '3.5e-03 7.1e-03 1.4e-02', 128: '7.1e-03 1.4e-02 2.8e-02',
          512: '7.1e-03 1.4e-02 2.8e-02'}
arms = '\n'.join(f'batch {b}, rate {rate}: --batch_size={b} --max_iters={_sequences // b} --warmup_iters={_sequences // b // 10} '
                 f'--log_interval={max(_sequences // b // 30, 1)} --learning_rate={rate}' for b in _rates for rate in _rates[b].split())
