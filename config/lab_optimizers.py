# What does the optimizer buy? Each with rates around its best; weight decay for the two that keep it apart.
#   python bench.py config/lab.py config/lab_optimizers.py --dataset=my_text.txt
what = 'compare'
out_dir = 'out/lab_optimizers'
arms = '\n'.join(f'{name}, rate {rate:g}: --optimizer={name} --learning_rate={rate} --weight_decay={0.1 * (name in ("adamw", "muon"))}'
                 for name, rates in dict(adamw=(5e-3, 1e-2), muon=(5e-3, 1e-2, 2e-2), adam=(5e-3, 1e-2), rmsprop=(1e-3, 3e-3, 1e-2),
                                         adagrad=(1e-2, 3e-2, 0.1), momentum=(0.1, 0.3, 1.0, 3.0), sgd=(1.0, 3.0, 5.0, 10.0)).items() for rate in rates)
