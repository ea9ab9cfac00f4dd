from trtllm_disagg.processes.interpreter import leave_current_directory

if __name__ == "__main__":
    leave_current_directory()
    from trtllm_disagg.cli import main

    main()
