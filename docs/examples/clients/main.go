// A client in Go over gRPC. How to build and run it: docs/howto/clients.md.
package main

import (
	"context"
	"fmt"
	"log"
	"time"

	"example/inference"
	"google.golang.org/grpc"
)

func texts(name string, values ...string) *inference.ModelInferRequest_InferInputTensor {
	column := &inference.InferTensorContents{}
	for _, value := range values {
		column.BytesContents = append(column.BytesContents, []byte(value))
	}
	return &inference.ModelInferRequest_InferInputTensor{
		Name: name, Datatype: "BYTES", Shape: []int64{int64(len(values))}, Contents: column}
}

func numbers(name string, values ...float32) *inference.ModelInferRequest_InferInputTensor {
	return &inference.ModelInferRequest_InferInputTensor{
		Name: name, Datatype: "FP32", Shape: []int64{int64(len(values))},
		Contents: &inference.InferTensorContents{Fp32Contents: values}}
}

func main() {
	connection, err := grpc.Dial("localhost:8500", grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	deadline, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	answer, err := inference.NewGRPCInferenceServiceClient(connection).ModelInfer(deadline, &inference.ModelInferRequest{
		ModelName: "shop",
		Inputs: []*inference.ModelInferRequest_InferInputTensor{
			texts("city", "Oslo", "Oslo"), texts("device", "phone", "phone"),
			texts("item", "item-11", "item-12"), numbers("price", 18.04, 9),
		},
		Outputs: []*inference.ModelInferRequest_InferRequestedOutputTensor{{Name: "logistic"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("version %s says %.3f\n", answer.ModelVersion, answer.Outputs[0].Contents.Fp32Contents)
}
